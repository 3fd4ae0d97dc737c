"""What a sweep file is written with: `Sweep`, the functions that make its arms, and `Match`."""

from tformer.lab.sweep.matching import Match as Match
from tformer.lab.sweep.overrides import Overrides as Overrides
from tformer.lab.sweep.overrides import Sweep as Sweep
from tformer.lab.sweep.overrides import chain as chain
from tformer.lab.sweep.overrides import choice as choice
from tformer.lab.sweep.overrides import grid as grid
from tformer.lab.sweep.overrides import log_uniform as log_uniform
from tformer.lab.sweep.overrides import one_at_a_time as one_at_a_time
from tformer.lab.sweep.overrides import product as product
from tformer.lab.sweep.overrides import sample as sample
from tformer.lab.sweep.overrides import seeds as seeds
from tformer.lab.sweep.overrides import uniform as uniform
from tformer.lab.sweep.overrides import zipped as zipped
