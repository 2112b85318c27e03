"""Every kernel in plain torch: the definition that faster implementations are tested against.

References run on any device and in any floating dtype. Sums that decide accuracy are computed in
float32. Block ids and slots are trusted: the scheduler checks them.
"""

from kernels.reference.attention import *  # noqa: F403
from kernels.reference.blocks import *  # noqa: F403
from kernels.reference.cache import *  # noqa: F403
from kernels.reference.experts import *  # noqa: F403
from kernels.reference.linear import *  # noqa: F403
from kernels.reference.logit_rules import *  # noqa: F403
from kernels.reference.pointwise import *  # noqa: F403
from kernels.reference.quantized import *  # noqa: F403
from kernels.reference.ranks import *  # noqa: F403
from kernels.reference.recurrent import *  # noqa: F403
from kernels.reference.sampling import *  # noqa: F403
from kernels.reference.steps import *  # noqa: F403
