"""Text generation over a step function: greedy, sampling, beam search."""

from tformer.decode.beam import Hypotheses as Hypotheses
from tformer.decode.beam import beam_search as beam_search
from tformer.decode.beam import length_penalty as length_penalty
from tformer.decode.generate import STRATEGIES as STRATEGIES
from tformer.decode.generate import make_generate as make_generate
from tformer.decode.sample import Prompt as Prompt
from tformer.decode.sample import greedy as greedy
from tformer.decode.sample import sample as sample
