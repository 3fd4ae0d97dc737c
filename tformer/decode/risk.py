"""Minimum Bayes risk: of several draws, the text that is most like all of them."""

from collections.abc import Callable, Sequence

Utility = Callable[[str, str], float]  # (text, the text that would be right) -> how much the text is worth


def expected_utilities(texts: Sequence[str], utility: Utility) -> list[float]:
    """Returns the mean utility of each text where each of the texts is as likely to be right (Eikema & Aziz 2020).

    Draws of a model stand in for its distribution. Texts that are the same are compared once. A utility is greatest
    where the texts are the same, also where both are empty, of which sacrebleu's scores are 0.
    """
    counts = {text: texts.count(text) for text in texts}
    expected = {
        text: sum(count * utility(text, other) for other, count in counts.items()) / len(texts) for text in counts
    }
    return [expected[text] for text in texts]


def ranked(texts: Sequence[str], utilities: Sequence[float]) -> list[int]:
    """Returns the places of the texts, each once, the most useful first; of equal ones, the first first."""
    first = {text: place for place, text in reversed(list(enumerate(texts)))}
    return sorted(first.values(), key=lambda place: (-utilities[place], place))


def chrf() -> Utility:
    """The F-score of character n-grams (Popovic 2015), from 0 to 100."""
    import sacrebleu

    metric = sacrebleu.CHRF()
    return lambda text, right: 100.0 if text == right else float(metric.sentence_score(text, [right]).score)


def bleu() -> Utility:
    """BLEU of a sentence, from 0 to 100: smoothed, and of n-grams no longer than the sentence (Post 2018)."""
    import sacrebleu

    metric = sacrebleu.BLEU(effective_order=True)
    return lambda text, right: 100.0 if text == right else float(metric.sentence_score(text, [right]).score)


def exact_match() -> Utility:
    """1 where texts are equal: the most frequent text wins."""
    return lambda text, right: float(text == right)


UTILITIES: dict[str, Callable[[], Utility]] = {'chrf': chrf, 'bleu': bleu, 'exact_match': exact_match}
