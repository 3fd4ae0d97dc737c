"""The text of small compiled programs."""


def main(*lines, more=''):
    """Returns a program that runs `lines` on x: f32[4,8], 128 bytes."""
    body = ''.join(f'  {line}\n' for line in ('%x = f32[4,8]{1,0} parameter(0)', *lines))
    return f'HloModule toy\n{more}\nENTRY %main (x: f32[4,8]) -> f32[] {{\n{body}}}\n'


def calling(*calls):
    """A program that calls kernels: (name, target, what JAX calls the operation)."""
    lines = (
        f'%{name} = bf16[2,8,4,16]{{3,2,1,0}} custom-call(%q), custom_call_target="{target}", '
        f'metadata={{op_name="{operation}"}}'
        for name, target, operation in calls
    )
    return main('%q = bf16[2,8,4,16]{3,2,1,0} constant({...})', *lines)
