"""Splits by hashes."""

import hashlib

from tformer.data.sources import records


def test_a_key_is_valid_test_or_train_by_its_place():
    keys = [str(number) for number in range(300)]
    places = {key: int(hashlib.md5(key.encode()).hexdigest()[:16], 16) / 2**64 for key in keys}
    for key in keys:
        assert records.place_of(key) == places[key]
        wanted = 'valid' if places[key] < 0.3 else 'test' if places[key] < 0.5 else 'train'
        assert records.split_of(key, valid=0.3, test=0.2) == wanted


def test_a_sample_has_a_fingerprint_of_its_own_for_each_size_and_key():
    split = records.Split('a', lambda: ([{'text': str(number)} for number in range(9)], 0))
    samples = [split.sample(3, (0,)), split.sample(3, (1,)), split.sample(4, (0,))]
    assert len({split.fingerprint, *(sample.fingerprint for sample in samples)}) == 4
    assert samples[0].fingerprint == split.sample(3, (0,)).fingerprint
    assert list(samples[0]) == list(samples[2])[:3] != list(samples[1])
