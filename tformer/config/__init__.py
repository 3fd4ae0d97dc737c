"""The configuration tree: frozen dataclasses, their ConfigDict form, overrides, and the table of objectives."""

from tformer.config.convert import changes as changes
from tformer.config.convert import coerce as coerce
from tformer.config.convert import config_dict as config_dict
from tformer.config.convert import difference as difference
from tformer.config.convert import digest as digest
from tformer.config.convert import field_types as field_types
from tformer.config.convert import from_dict as from_dict
from tformer.config.convert import from_json as from_json
from tformer.config.convert import load as load
from tformer.config.convert import override as override
from tformer.config.convert import parts as parts
from tformer.config.convert import recipe as recipe
from tformer.config.convert import split as split
from tformer.config.convert import to_dict as to_dict
from tformer.config.convert import values as values
from tformer.config.model import Model as Model
from tformer.config.model import own_layers as own_layers
from tformer.config.python_files import execute as execute
from tformer.config.run import AXES as AXES
from tformer.config.run import Config as Config
from tformer.config.run import Data as Data
from tformer.config.run import Decode as Decode
from tformer.config.run import Evaluate as Evaluate
from tformer.config.run import Mesh as Mesh
from tformer.config.run import Optimizer as Optimizer
from tformer.config.run import Train as Train
