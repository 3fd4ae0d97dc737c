"""The pages of the reference that are generated from the code: commands, config fields, Python names.

`mkdocs build` calls `on_files`; mkdocs.yml names this file as a hook.
"""

import inspect
import itertools
import typing

import tformer
from tformer import checks, commands

if typing.TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

SECTIONS = {
    'model': 'The architecture. A field that does not apply to the chosen parts is refused, unless a recipe set it.',
    'data': 'Where examples come from, how they become tokens, and how tokens become batches.',
    'optimizer': 'How gradients become updates.',
    'train': 'The objective, the length of the run, and how often it reports, evaluates and saves.',
    'mesh': 'How many devices each axis has, and which logical names are split over which axes.',
    'decode': 'How text is generated.',
    'evaluate': 'How generated text and predictions are scored.',
}
EXTENSIONS = (
    '`extensions` has no section: `--config.extensions=a.py,b.py` names files of your own that add rows to the tables. '
    '[Add a part of your own](../how-to/extend.md#from-outside-the-package) shows one.'
)


def config_page() -> str:
    """Returns the reference of all config fields: one table for each section."""
    head, rule, *rows = checks.ablation_table().splitlines()
    lines = ['# Config fields', '']
    lines += ['Any field is set on the command line, by its type, with `--config.SECTION.FIELD=VALUE`:', '']
    example = 'tformer train --config=configs/g2p.py:demo --workdir=runs/rms --config.model.norm=rmsnorm'
    lines += ['```sh', example, '```', '']
    lines += ['A tuple is written `a,b`. A choice that is off is `None`. This page is generated from the code.']
    sections = itertools.groupby(rows, lambda row: row.lstrip('| `').partition('.')[0])
    for section, rows_of_section in sections:
        lines += ['', f'## {section}', '', SECTIONS[section], '', head, rule, *rows_of_section]
    lines += ['', '## extensions', '', EXTENSIONS]
    return '\n'.join(lines) + '\n'


def commands_page() -> str:
    """Returns the reference of the command line: every command's help, as the command line prints it."""
    lines = ['# Commands', '', '`tformer COMMAND` is the same as `python -m tformer COMMAND`.']
    lines += ['A mistake ends in one line that names the nearest valid thing, with exit code 2:', '']
    lines += ['```', '$ tformer train --config=configs/g2p.py --workdir=runs/x --config.model.norm=rmsnrom']
    lines += ["tformer: model.norm='rmsnrom' is unknown; did you mean 'rmsnorm'? (valid: ...)", '```', '']
    lines += ['| command | what it does |', '| --- | --- |']
    lines += [f'| [`{name}`](#{name}) | {command.summary} |' for name, command in commands.COMMANDS.items()]
    for name, command in commands.COMMANDS.items():
        lines += ['', f'## {name}', '', '```text', command.help(), '```']
    return '\n'.join(lines) + '\n'


def api_page() -> str:
    """Returns the reference of the names that `import tformer` gives, for mkdocstrings to fill in."""
    lines = ['# Python', '', '`import tformer` loads nothing; each name loads on first use.', '']
    for name in tformer.__all__:
        value = getattr(tformer, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            lines += ['', f'::: {value.__module__}.{value.__qualname__}']
    return '\n'.join(lines) + '\n'


PAGES = {'reference/config.md': config_page, 'reference/commands.md': commands_page, 'reference/api.md': api_page}


def on_files(files: 'Files', config: 'MkDocsConfig') -> 'Files':
    """Adds the generated pages to the files of the site."""
    from mkdocs.structure.files import File

    for path, page in PAGES.items():
        files.append(File.generated(config, path, content=page()))
    return files
