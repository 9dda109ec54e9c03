"""Lower estimates of Lipschitz constants: what a bound is held against, never a bound itself."""

from lipformer.estimates.attack import Attack, attack_lipschitz
from lipformer.estimates.estimate import Estimate, estimate_lipschitz

__all__ = ["Attack", "Estimate", "attack_lipschitz", "estimate_lipschitz"]
