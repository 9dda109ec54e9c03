window.MathJax = {
  tex: {inlineMath: [["\\(", "\\)"]], displayMath: [["\\[", "\\]"]]},
  svg: {scale: 0.92},
  options: {ignoreHtmlClass: ".*|", processHtmlClass: "arithmatex", enableMenu: false},
  startup: {
    pageReady: () => MathJax.startup.defaultPageReady().then(() => {
      // A formula in a line that is wider than its page scrolls.
      for (const formula of document.querySelectorAll("p > span.arithmatex, li > span.arithmatex"))
        if (formula.offsetWidth > formula.closest("li, article").clientWidth) formula.classList.add("wide");
    }),
  },
};
