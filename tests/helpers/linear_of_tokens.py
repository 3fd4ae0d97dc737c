"""What a classifier can know of a text by its tokens: a linear model of them beside one of words and characters.

    python tests/helpers/linear_of_tokens.py WORKDIR DIR [EXAMPLES ...]

prints the accuracy on DIR/test.tsv of logistic regression on TF-IDF of one to three of the tokens that the run's
tokenizer makes, and that of the baseline of `tformer evaluate`, for as many texts of DIR/train.tsv (default: all).
"""

import pathlib
import sys

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.multiclass import OneVsRestClassifier

from tformer.commands import baseline
from tformer.data.sources.records import Record
from tformer.training import workdir

C = 100.0  # what the cross-validation of the baseline finds for the three sets of docs/results.md


def records(file: pathlib.Path) -> list[Record]:
    lines = file.read_text(encoding='utf-8').splitlines()
    return [dict(zip(('label', 'text'), line.split('\t', 1), strict=True)) for line in lines]


def main(run: str, place: str, *amounts: str) -> None:
    tokenizer = workdir.load_tokenizers(pathlib.Path(run)).target
    all_of, test = (records(pathlib.Path(place, f'{split}.tsv')) for split in ('train', 'test'))
    right = np.array([record['label'] for record in test])
    for amount in map(int, amounts or [str(len(all_of))]):
        train = [all_of[i * len(all_of) // amount] for i in range(amount)]
        tokens = TfidfVectorizer(
            analyzer=lambda text: [
                tuple(ids[i : i + n]) for ids in [tokenizer.encode(text)] for n in (1, 2, 3) for i in range(len(ids))
            ],
            sublinear_tf=True,
            max_features=baseline.MOST_FEATURES,
        )
        linear = OneVsRestClassifier(LogisticRegression(C=C, solver='liblinear', dual=True, tol=0.1, random_state=0))
        linear.fit(tokens.fit_transform([record['text'] for record in train]), [record['label'] for record in train])
        of_tokens = linear.predict(tokens.transform([record['text'] for record in test]))
        fitted, said = baseline.of_objective('classification').fit(train)
        ours, theirs = (np.mean(np.array(found) == right) for found in (of_tokens, fitted(test)))
        print(f'{amount:,} texts: {ours:.1%} by tokens, {theirs:.1%} by {said}')


if __name__ == '__main__':
    main(*sys.argv[1:])
