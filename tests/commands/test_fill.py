"""Masks are filled with what the model's logits say."""

import json

import numpy as np
import pytest
import scipy.special

import hub_directories
from fresh_runs import fresh_run
from tformer import __main__ as command_line
from tformer.commands.fill import fill
from tformer.commands.import_ import import_hub
from tformer.commands.run import Run
from tformer.errors import UserError


@pytest.mark.slow
@pytest.mark.parametrize('objective', ['masked_lm', 'masked_lm_nsp', 'replaced_token'])
@pytest.mark.proof_cases('replaced_token')
def test_candidates_are_the_likeliest_tokens_of_each_mask(objective) -> None:
    run = fresh_run(objective)
    tokenizer = run.tokenizers.target
    texts = ['ab <mask>d<mask>', '<mask>' + 'abcde' * 5]
    found = fill(run, texts, top=3)
    assert [len(masks) for masks in found] == [2, 1]
    mask, frame = tokenizer.specials.mask, (tokenizer.specials.cls, tokenizer.specials.sep)
    for masks, text in zip(found, texts, strict=True):
        letters = [mask if piece == '#' else tokenizer.encode(piece)[0] for piece in text.replace('<mask>', '#')]
        inputs = np.array([[frame[0], *letters, frame[1]]])
        batch = {'inputs': inputs, 'positions': np.arange(inputs.size)[None], 'weights': np.zeros(inputs.shape)}
        outputs = run.apply(batch)
        logits_TV = np.asarray(outputs[0] if isinstance(outputs, tuple) else outputs)[0]
        for candidates, place in zip(masks, np.flatnonzero(inputs[0] == mask), strict=True):
            probabilities = scipy.special.softmax(logits_TV[place])
            best = sorted(tokenizer.ordinary_ids.tolist(), key=lambda i: -probabilities[i])[:3]
            assert [one['id'] for one in candidates] == best
            assert [one['text'] for one in candidates] == [tokenizer.decode([i]) for i in best]
            np.testing.assert_allclose([one['probability'] for one in candidates], probabilities[best], atol=1e-5)


def test_a_mask_stands_for_the_space_before_its_word_where_the_vocabulary_holds_it() -> None:
    run = fresh_run('masked_lm')
    tokenizer = run.tokenizers.target
    assert not tokenizer.space_leads
    apart, together = fill(run, ['ab <mask>d', 'ab<mask>d'])
    assert apart != together
    vars(tokenizer)['space_leads'] = True
    assert fill(run, ['ab <mask>d', 'ab<mask>d']) == [together, together]


def test_the_command_prints_a_line_of_json_for_each_text(tmp_path, capsys) -> None:
    hub_directories.write(tmp_path / 'hub', 'bert')
    import_hub(str(tmp_path / 'hub'), tmp_path / 'run')
    command_line.main(['tformer', 'fill', f'--workdir={tmp_path}/run', '--top=2', 'a [MASK] b', '[MASK] cc'])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    run = Run.load(tmp_path / 'run')
    assert run.tokenizers.target.space_leads  # its words stand after spaces
    assert [row['text'] for row in rows] == ['a [MASK] b', '[MASK] cc']
    assert [row['masks'] for row in rows] == fill(run, ['a [MASK] b', '[MASK] cc'], 2)
    assert all(len(candidates) == 2 for row in rows for candidates in row['masks'])


@pytest.mark.parametrize(
    ('objective', 'top', 'texts', 'line'),
    [
        ('masked_lm', 5, ['a<mask>', 'ab'], 'in.txt:2: it has no <mask>'),
        ('masked_lm', 5, ['<mask>' + 'a' * 30], 'in.txt:1: it has 33 tokens, the model takes 32'),
        ('masked_lm', 0, ['<mask>'], '--top=0 must be at least 1'),
        ('regression', 5, ['<mask>'], 'train.objective=regression has no masks; valid: masked_lm, '),
    ],
)
def test_what_cannot_be_filled_is_named(objective, top, texts, line) -> None:
    with pytest.raises(UserError, match=line):
        fill(fresh_run(objective), texts, top, source='in.txt')
