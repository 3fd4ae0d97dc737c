"""Whether a config is valid: keys, ranges, fields without effect and rules between fields; and its derived values."""

from tformer.checks.applies import load as load
from tformer.checks.applies import settle as settle
from tformer.checks.applies import settled as settled
from tformer.checks.applies import with_effect as with_effect
from tformer.checks.check import check as check
from tformer.checks.check import check_here as check_here
from tformer.checks.choices import TABLES as TABLES
from tformer.checks.choices import ablation_table as ablation_table
from tformer.checks.choices import check_choices as check_choices
from tformer.checks.derived import resolve as resolve
