window.MathJax = {
  tex: {inlineMath: [["\\(", "\\)"]], displayMath: [["\\[", "\\]"]]},
  svg: {scale: 0.92},
  options: {enableMenu: false},
  startup: {
    pageReady: () => MathJax.startup.defaultPageReady().then(() => {
      for (const formula of document.querySelectorAll("span.arithmatex")) {
        // What touches a formula stays on its line.
        const next = formula.nextSibling;
        if (next?.nodeType === Node.TEXT_NODE) {
          const touching = next.data.match(/^\S*/)[0];
          formula.append(touching);
          next.data = next.data.slice(touching.length);
        }
        const before = formula.previousSibling;
        if (before?.nodeType === Node.TEXT_NODE) {
          const touching = before.data.match(/\S*$/)[0];
          formula.prepend(touching);
          before.data = before.data.slice(0, before.data.length - touching.length);
        }
        // A formula in a line that is wider than its page scrolls.
        if (formula.offsetWidth > formula.closest("td, th, li, article").clientWidth) formula.classList.add("wide");
      }
      // Formulas in what a search finds; one with a marked word in it would stay TeX.
      const found = document.querySelector(".md-search-result__list");
      new MutationObserver(() => {
        for (const text of found.querySelectorAll("article"))
          text.innerHTML = text.innerHTML.replace(/\\[([].*?\\[)\]]/gs, (formula) => formula.replace(/<.*?>/g, ""));
        MathJax.typeset([found]);
      }).observe(found, {childList: true});
    }),
  },
};
