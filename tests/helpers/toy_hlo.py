"""The text of small compiled programs."""


def main(*lines, more=''):
    """Returns a program that runs `lines` on x: f32[4,8], 128 bytes."""
    body = ''.join(f'  {line}\n' for line in ('%x = f32[4,8]{1,0} parameter(0)', *lines))
    return f'HloModule toy\n{more}\nENTRY %main (x: f32[4,8]) -> f32[] {{\n{body}}}\n'
