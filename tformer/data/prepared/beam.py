"""Apache Beam as the engine of a preparation: each stage is a pipeline over the numbers of its entries.

What runs on a worker is `stages.run`, as in processes of one machine; the entries are in the set's directory, which all
workers must reach by the same path.
"""

import functools
import shlex

from tformer.data.prepared import stages
from tformer.data.prepared.prepare import Engine, Say
from tformer.data.sources.text_reader import needed
from tformer.errors import UserError


def engine(flags: str) -> Engine:
    """Returns an engine by Beam's own flags, e.g. '--runner=DirectRunner --direct_num_workers=2'.

    Raises:
      UserError: Beam is not installed.
    """
    beam = needed('apache_beam', '--beam', "'tformer[beam]'")
    options = beam.options.pipeline_options.PipelineOptions(shlex.split(flags))

    def run(place: str, stage: str, count: int, say: Say) -> None:
        make = functools.partial(_make, place, stage)
        say(f'{stage}: {count:,} entries, by Beam')
        try:
            with beam.Pipeline(options=options) as pipeline:
                _ = pipeline | beam.Create(range(count)) | beam.Reshuffle() | beam.Map(make)
        except Exception as error:  # of the runner's choice, around the worker's
            raise UserError(f'{stage} failed in Beam: {str(error).strip().splitlines()[-1]}') from error

    return run


def _make(place: str, stage: str, number: int) -> None:
    stages.run(place, stage, number)
