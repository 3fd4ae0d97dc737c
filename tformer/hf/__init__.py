"""Weights of the hub's checkpoints: one rule table a family, in numpy alone."""

from tformer.hf.convert import export_params as export_params
from tformer.hf.convert import import_params as import_params
from tformer.hf.models import FAMILIES as FAMILIES
from tformer.hf.models import config_of as config_of
from tformer.hf.models import model_of as model_of
from tformer.hf.special_tokens import special_tokens_of as special_tokens_of
