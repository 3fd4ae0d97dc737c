"""What a sweep file is written with: `Sweep`, the functions that make its arms or search them, and `Match`."""

from tformer.lab.sweep.declaration import Sweep as Sweep
from tformer.lab.sweep.distributions import choice as choice
from tformer.lab.sweep.distributions import integers as integers
from tformer.lab.sweep.distributions import log_uniform as log_uniform
from tformer.lab.sweep.distributions import uniform as uniform
from tformer.lab.sweep.matching import Match as Match
from tformer.lab.sweep.overrides import Overrides as Overrides
from tformer.lab.sweep.overrides import chain as chain
from tformer.lab.sweep.overrides import grid as grid
from tformer.lab.sweep.overrides import one_at_a_time as one_at_a_time
from tformer.lab.sweep.overrides import product as product
from tformer.lab.sweep.overrides import sample as sample
from tformer.lab.sweep.overrides import seeds as seeds
from tformer.lab.sweep.overrides import zipped as zipped
from tformer.lab.sweep.rungs import asha as asha
from tformer.lab.sweep.rungs import hyperband as hyperband
from tformer.lab.sweep.rungs import median as median
from tformer.lab.sweep.searches import search as search
