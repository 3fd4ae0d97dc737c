"""JSON schemas: what fits is written, nothing else is, and what is not obeyed is refused."""

import json
import math
import random
import re

import numpy as np
import pytest

from tformer.decode import json_overlaps, json_schemas
from tformer.errors import UserError


def accepts(made, text):
    state = 0
    for byte in text.encode():
        state = made.next_QB[state, byte]
        if state < 0:
            return False
    return bool(made.accepting_Q[state])


def drawn(made, rng, longest=60):
    """A text of an automaton, byte by byte: quotes, escapes and ends are likelier than letters."""
    Q = len(made.next_QB)
    least_Q = np.where(made.accepting_Q, 0, Q)
    for _ in range(Q):
        nearer_Q = np.minimum(least_Q, np.where(made.next_QB >= 0, least_Q[made.next_QB], Q).min(1) + 1)
        if (nearer_Q == least_Q).all():
            break
        least_Q = nearer_Q
    state, text = 0, b''
    while True:
        bytes_ = [byte for byte in range(256) if made.next_QB[state, byte] >= 0]
        if made.accepting_Q[state] and (not bytes_ or len(text) > longest or rng.random() < 0.1):
            return text.decode()
        if len(text) > longest:
            bytes_ = [byte for byte in bytes_ if least_Q[made.next_QB[state, byte]] < least_Q[state]] or bytes_
        marks = [byte for byte in bytes_ if chr(byte) in '"\\,]}']
        byte = rng.choice(marks if marks and rng.random() < 0.3 else bytes_)
        text, state = text + bytes([byte]), made.next_QB[state, byte]


def fits(schema, value, whole):
    """Whether a value fits a schema, by the words of the standard."""
    if isinstance(schema, bool):
        return schema
    if '$ref' in schema:
        return fits(json_overlaps.place(whole, schema['$ref']), value, whole)
    if 'oneOf' in schema:
        return sum(fits(each, value, whole) for each in schema['oneOf']) == 1
    if 'anyOf' in schema:
        return any(fits(each, value, whole) for each in schema['anyOf'])
    if 'enum' in schema or 'const' in schema:
        return json.dumps(value) in map(json.dumps, schema.get('enum', [schema.get('const')]))
    kinds = {'null': type(None), 'boolean': bool, 'integer': int, 'number': (int, float), 'string': str, 'array': list}
    names = schema.get('type', [*kinds, 'object'])
    types = {**kinds, 'object': dict}
    name = next((name for name in ([names] if isinstance(names, str) else names) if isinstance(value, types[name])), '')
    if not name or (isinstance(value, bool) and name != 'boolean'):
        return False
    if name in ('integer', 'number'):
        over = schema.get('minimum', value) <= value and schema.get('exclusiveMinimum', -math.inf) < value
        return over and value <= schema.get('maximum', value) and value < schema.get('exclusiveMaximum', math.inf)
    if name == 'string':
        sizes = schema.get('minLength', 0) <= len(value) <= schema.get('maxLength', len(value))
        return sizes and re.search(schema.get('pattern', ''), value) is not None
    if name == 'array':
        first = schema.get('prefixItems', [])
        each = [*zip(first, value, strict=False), *((schema.get('items', True), item) for item in value[len(first) :])]
        sizes = schema.get('minItems', 0) <= len(value) <= schema.get('maxItems', len(value))
        return sizes and all(fits(item, one, whole) for item, one in each)
    if name == 'object':
        other, properties = schema.get('additionalProperties', True), schema.get('properties', {})
        have = all(key in value for key in schema.get('required', []))
        return have and all(fits(properties.get(key, other), one, whole) for key, one in value.items())
    return True


TEXT, NUMBER = {'type': 'string', 'maxLength': 3}, {'type': 'integer'}
KINDS = {
    kind: {'type': 'object', 'properties': {'kind': {'const': kind}, 'n': one}, 'required': ['kind', 'n']}
    for kind, one in (('a', NUMBER), ('b', TEXT))
}
TREE = {
    'type': 'object',
    'properties': {'n': NUMBER, 'below': {'type': 'array', 'items': {'$ref': '#/$defs/node'}}},
}
MORE = {
    'type': 'object',
    'properties': {'next': {'oneOf': [{'type': 'null'}, {'$ref': '#/$defs/more'}]}},
    'required': ['next'],
}
SCHEMAS = [
    {'type': 'string'},
    {'type': 'string', 'minLength': 2, 'maxLength': 4},
    {'type': 'string', 'pattern': r'^["\\a]{1,3}$'},
    {'type': 'string', 'pattern': r'^.(a|\d"?)[^b]{1,2}$'},
    {'type': 'string', 'pattern': 'a/b'},
    {'type': 'number'},
    {'type': 'number', 'exclusiveMinimum': 0, 'maximum': 0.125},
    {'type': 'number', 'minimum': -7.25, 'exclusiveMaximum': 12},
    {'type': ['integer', 'number'], 'exclusiveMaximum': -0.5},
    {'type': ['string', 'null', 'integer'], 'maxLength': 2, 'minimum': -3},
    {'enum': ['a"\n', 1, None, True, [1, {'b': []}], '\u00e9']},
    {'type': 'array', 'items': NUMBER, 'minItems': 2, 'maxItems': 3},
    {'type': 'array', 'items': TEXT, 'maxItems': 1},
    {'type': 'array', 'items': {'type': 'array', 'items': {'type': 'null'}, 'minItems': 1}},
    {'type': 'array', 'prefixItems': [NUMBER, {'type': 'boolean'}], 'items': False, 'minItems': 2},
    {'properties': {'a': NUMBER, 'b': TEXT, 'c': {'type': 'null'}}, 'required': ['b']},
    {'type': 'object', 'properties': {'a.b': NUMBER, 'c"': {'type': 'boolean'}}, 'additionalProperties': False},
    {'type': 'object', 'additionalProperties': NUMBER},
    {'type': 'object', 'properties': {'a': {'properties': {'b': {'$ref': '#/$defs/t'}}}}, '$defs': {'t': TEXT}},
    {'oneOf': [NUMBER, {'type': 'string'}, {'enum': [True, None, [1]]}]},
    {'oneOf': [{'$ref': '#/$defs/a'}, {'$ref': '#/$defs/b'}], '$defs': KINDS},
    {'anyOf': [NUMBER, {'type': 'array', 'maxItems': 0}, {'const': 'x y'}], 'title': 'noted'},
    {'$ref': '#/$defs/node', '$defs': {'node': {**TREE, 'required': ['n', 'below']}}},
    {'oneOf': [{'type': 'null'}, {'$ref': '#/$defs/more'}], '$defs': {'more': MORE}},
    {'prefixItems': [NUMBER, {'$ref': '#/prefixItems/0'}]},
    {'anyOf': [False, {'type': 'array', 'items': {'minimum': 1, 'maximum': 0}}, TEXT, {'$ref': '#/anyOf/0'}]},
    {'properties': {'a': False, 'b': NUMBER}, 'required': ['b']},
    pytest.param({}, marks=pytest.mark.proof),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize('schema', SCHEMAS, ids=json.dumps)
def test_every_text_that_may_be_written_is_json_that_fits(schema) -> None:
    made, rng = json_schemas.automaton(schema), random.Random(0)
    texts = {drawn(made, rng) for _ in range(60)}
    assert len(texts) > 3
    for text in texts:
        assert fits(schema, json.loads(text), schema), text


NESTED = ['{"a":' + '{"next":' * depth + 'null' + '}' * depth + '}' for depth in range(1, 7)]


@pytest.mark.parametrize(
    ('schema', 'written', 'not_written'),
    [
        ({'type': 'string'}, ['""', '"a"', r'"\"\\\n"', '"\u4e2d/"'], ['"', 'a', '"\n"', r'"\q"', '"a"b"']),
        ({'type': 'string', 'pattern': 'a|c"'}, ['"a"', '"ba "', r'"c\""'], ['"b"', '"c""', '"a']),
        (
            {'pattern': r'^[^\d]\W.$'},
            ['"a-b"', '"\u4e2d\u2020 "'],
            ['"\u0663-b"', '"a\u00e9b"', '"a-\u2028"', r'"a-\r"'],
        ),
        ({'properties': {'a': MORE}, '$defs': {'more': MORE}}, NESTED[:5], NESTED[5:]),
        ({'type': 'number', 'minimum': 1.5e9}, ['1500000000', '1700000000.25'], ['1499999999.9', '1e10']),
        ({'type': 'string', 'format': 'date'}, ['"2024-02-28"', '"1999-12-31"'], ['"2023-02-29"', '"2024-13-01"']),
        ({'type': 'number'}, ['0', '-0.5', '12e-3', '7'], ['01', '.5', '1.', '+1', 'NaN']),
        ({'type': 'object', 'properties': {'a': NUMBER}}, ['{}', '{"a":1}', '{ "a": 1 }'], ['{"a":}', '{"a":1,}']),
        ({'properties': {'a': NUMBER, 'b': NUMBER}}, ['{"b":2}', '{"a":1, "b":2}'], ['{"b":2,"a":1}', '{,"b":2}']),
        ({'type': 'array', 'items': NUMBER}, ['[]', '[1, 2,3]'], ['[,1]', '[1,]', '[1 2]']),
        ({}, ['{"a": [1, "b"]}', 'null', '[[]]'], ['[[[1]]]', '{1: 2}']),
    ],
)
def test_usual_texts_can_be_written(schema, written, not_written) -> None:
    made = json_schemas.automaton(schema)
    assert [text for text in written if not accepts(made, text)] == []
    assert [text for text in not_written if accepts(made, text)] == []


@pytest.mark.parametrize(
    ('low', 'high'),
    [(0, 0), (3, 12), (-7, 105), (-123, -45), (99, 1010), (-20, None), (17, None), (None, 31), (None, -8)],
)
def test_integers_are_those_of_their_range(low, high) -> None:
    schema = {'type': 'integer'}
    schema |= {} if low is None else {'exclusiveMinimum': low - 1, 'minimum': low - 5}
    schema |= {} if high is None else {'maximum': high, 'exclusiveMaximum': high + 9}
    made = json_schemas.automaton(schema)
    for number in range(-1200, 1200):
        within = (low is None or low <= number) and (high is None or number <= high)
        assert accepts(made, str(number)) == within, number
    assert not accepts(made, '-0') and not accepts(made, '007')


@pytest.mark.parametrize(('low', 'high'), [(-(10**15), 10**17), (-987_654_321_012_345_678, 10**40 + 7), (10**19, None)])
def test_wide_ranges_of_integers_have_few_states(low, high) -> None:
    made = json_schemas.automaton({'type': 'integer', 'minimum': low, **({} if high is None else {'maximum': high})})
    assert len(made.next_QB) < 500
    for number in {low - 1, low, low + 1, 0, 5, (high or 10**25) - 1, high or 10**25, (high or 10**25) + 1}:
        assert accepts(made, str(number)) == (low <= number and (high is None or number <= high)), number


BOUNDS = [None, -12.5, -3, -0.0625, 0, 0.3, 1, 9.99, 10]


@pytest.mark.parametrize('high', BOUNDS)
@pytest.mark.parametrize('low', BOUNDS)
def test_numbers_are_those_of_their_range(low, high) -> None:
    rng = random.Random(f'{low} {high}')
    for above, below in ((False, False), (True, False), (False, True), (True, True)):
        schema: dict = {'type': 'number'}
        schema |= {} if low is None else {'exclusiveMinimum' if above else 'minimum': low}
        schema |= {} if high is None else {'exclusiveMaximum' if below else 'maximum': high}
        if low is not None and high is not None and (low > high or (low == high and (above or below))):
            with pytest.raises(UserError, match='no number'):
                json_schemas.automaton(schema)
            continue
        made = json_schemas.automaton(schema)
        near = [bound for bound in (low, high) if bound is not None] or [0]
        for _ in range(60):
            text = f'{rng.choice([*near, rng.uniform(-20, 20)]):.{rng.randint(0, 5)}f}'
            if text.startswith('-') and float(text) == 0 and len(schema) > 1:
                continue  # zero has no sign within bounds
            fitting = fits(schema, float(text), schema)
            assert accepts(made, text) == fitting, (schema, text)
            assert accepts(made, f'{text}0' if '.' in text else f'{text}.0') == fitting, (schema, text)


WHOLE = {'$defs': {'more': MORE}}


@pytest.mark.parametrize(
    ('a', 'b', 'found'),
    [
        ({'const': 1}, {'const': 1.0}, False),
        ({'const': 1}, {'const': True}, True),
        ({'enum': [[1, {'x': True}]]}, {'const': [1, {'x': 1}]}, True),
        ({'enum': ['a', 'b']}, {'enum': ['b']}, False),
        ({'type': 'integer'}, {'type': 'number'}, False),
        ({'type': 'integer'}, {'const': 0.5}, True),
        ({'type': ['null', 'string']}, {'type': ['array', 'object']}, True),
        ({'anyOf': [{'type': 'null'}, {'type': 'array'}]}, {'type': 'string'}, True),
        ({'anyOf': [{'type': 'null'}, {'type': 'string'}]}, {'type': 'string'}, False),
        (KINDS['a'], KINDS['b'], True),
        (KINDS['a'], {**KINDS['b'], 'required': ['kind'], 'properties': {'kind': {'type': 'string'}}}, False),
        (KINDS['a'], {**KINDS['b'], 'type': ['object', 'null']}, True),
        (True, {'type': 'string'}, False),
        (MORE, {**MORE, 'title': 'again'}, False),
    ],
)  # fmt: skip
def test_schemas_exclude_each_other_only_where_no_value_fits_both(a, b, found) -> None:
    assert json_overlaps.apart(WHOLE, a, b) == json_overlaps.apart(WHOLE, b, a) == found


ALL = [{'properties': {'x': {'$ref': f'#/$defs/{number}'}}} for number in range(7)]
FULL = {str(number): {'anyOf': [{'const': number}, *ALL]} for number in range(7)}


@pytest.mark.parametrize(
    ('schema', 'line'),
    [
        ({'type': 'object', 'propertis': {}}, r"#: 'propertis' is not supported; did you mean 'properties'\?"),
        ({'type': 'array', 'uniqueItems': True}, "#: 'uniqueItems' is not supported"),
        ({'type': 'array', 'items': {'multipleOf': 2}}, "#/items: 'multipleOf' is not supported"),
        ({'type': 'number', 'minimum': 0.5, 'exclusiveMaximum': 0.5}, '#: no number of 15 digits is within the bounds'),
        ({'type': 'number', 'minimum': 1e15}, '#: bounds may have 15 digits'),
        ({'type': 'number', 'minimum': 1e9, 'maximum': 1.0000001}, '#: bounds may have 15 digits'),
        ({'type': 'number', 'minimum': float('nan')}, '#: minimum=NaN must be a number'),
        ({'type': 'integer', 'maximum': 10**400}, r'#: maximum=10+ must be a number from -1e308 to 1e308'),
        ({'type': 'string', 'minimum': 0}, "#: 'minimum' is not of type string"),
        ({'oneOf': [NUMBER, {'type': 'number'}]}, '#: oneOf: schemas 0 and 1 do not exclude each other'),
        ({'oneOf': [TEXT, NUMBER, {'enum': [True, 2.0]}]}, '#: oneOf: schemas 1 and 2 do not exclude each other'),
        ({'oneOf': [{'properties': {}}, TEXT]}, '#: oneOf: schemas 0 and 1 do not exclude each other'),
        ({'minimum': 0, 'minLength': 1}, "#: 'minLength' is not of type any: no type is stated"),
        ({'type': 'string', 'pattern': 'a', 'maxLength': 3}, '#: pattern, format and a length are supported one at a'),
        ({'type': 'string', 'format': 'dat'}, "#: format='dat' is not supported; did you mean 'date'"),
        ({'type': 'string', 'minLength': '3'}, '#: minLength="3" must be an integer of at least 0'),
        ({'type': 'integer', 'minimum': 3, 'maximum': 2}, '#: no integer is from 3 to 2'),
        ({'type': 'string', 'enum': ['a', 1]}, '#: 1 is not of type string'),
        ({'type': 'object', 'required': ['a']}, "#: required='a' is not in properties"),
        ({'anyOf': [True], 'minLength': 1}, "#: 'minLength' beside 'anyOf' is not supported"),
        ({'properties': {'a': False}, 'required': ['a']}, '#/properties/a: no value fits false'),
        ({'items': False, 'minItems': 1}, '#: no value fits items, and minItems=1'),
        ({'items': {'$id': 'x'}}, r"#/items: '\$id' is not supported inside a schema"),
        ({'type': []}, r'#: type=\[\] must be a type or a list of at least one'),
        ({'type': [{}]}, r'#: type=\{\} is unknown; valid: null, '),
        ({'$ref': '#/$defs/a'}, r"#: \$ref='#/\$defs/a' is not there"),
        ({'anyOf': [{'$ref': '#'}]}, r"#/anyOf/0: no value fits \$ref='#', or none in which it contains itself 3"),
        ({'$ref': '#/$defs/0', '$defs': FULL}, '.*references are in each other in more than 1,000 ways'),
        ({'$ref': 'other.json'}, r'#: \$ref="other.json" must be a place in the same file'),
        ({'prefixItems': [True], 'minItems': 2}, '#: prefixItems has 1 values, which minItems and'),
    ],
)  # fmt: skip
def test_what_would_not_be_obeyed_is_refused_by_name(schema, line) -> None:
    with pytest.raises(UserError, match=f'^at {line}'):
        json_schemas.automaton(schema)
