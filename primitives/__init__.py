"""The epilogue language. Author-facing names; importing this imports neither torch nor cutlass.

Each module says in its own `__all__` what of it is the language.
"""

from coda_agent.primitives import activations, elementary, groups, ops, placed, resources, rounding
from coda_agent.primitives.activations import *
from coda_agent.primitives.derivatives import derivative
from coda_agent.primitives.elementary import *
from coda_agent.primitives.gather import gather
from coda_agent.primitives.groups import *
from coda_agent.primitives.ops import *
from coda_agent.primitives.pairwise import interleave, pairs
from coda_agent.primitives.placed import *
from coda_agent.primitives.program import Program, epilogue
from coda_agent.primitives.ptx import ptx
from coda_agent.primitives.resources import *
from coda_agent.primitives.rotary import rotary, rotate
from coda_agent.primitives.rounding import *

__all__ = ["Program", "derivative", "epilogue", "gather", "interleave", "pairs", "ptx"]
__all__ += ["rotary", "rotate"]
__all__ += activations.__all__
__all__ += elementary.__all__
__all__ += groups.__all__
__all__ += ops.__all__
__all__ += placed.__all__
__all__ += resources.__all__
__all__ += rounding.__all__
__all__.sort()  # pyright: ignore[reportUnsupportedDunderAll]
