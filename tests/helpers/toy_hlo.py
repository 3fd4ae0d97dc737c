"""The text of small compiled programs."""


def main(*lines, more=''):
    """Returns a program that runs `lines` on x: f32[4,8], 128 bytes."""
    body = ''.join(f'  {line}\n' for line in ('%x = f32[4,8]{1,0} parameter(0)', *lines))
    return f'HloModule toy\n{more}\nENTRY %main (x: f32[4,8]) -> f32[] {{\n{body}}}\n'


def calling(*calls):
    """A program that calls kernels, each of which returns a pair: (name, target, what JAX calls the operation)."""
    array = 'bf16[2,8,4,16]{3,2,1,0}'
    lines = [f'%q = {array} constant({{...}})']
    for name, target, operation in calls:
        named = f'metadata={{op_name="{operation}"}}'
        lines.append(f'%{name} = ({array}, {array}) custom-call(%q), custom_call_target="{target}", {named}')
        lines.append(f'%of_{name} = {array} get-tuple-element(%{name}), index=0, {named}')
    return main(*lines)
