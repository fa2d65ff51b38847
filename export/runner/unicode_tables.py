"""Write the Unicode tables of ``tokenizer/unicode.cc`` as C++: decompositions, compositions, combining classes.

The build runs it; the tables are those of the Python that does (3.11: Unicode 14).
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterable
from pathlib import Path

HANGUL = range(0xAC00, 0xD7A4)  # decomposed by arithmetic


def rows(numbers: Iterable[str]) -> str:
    return ",\n".join(numbers)


def main() -> None:
    singles: list[str] = []  # code point, compatibility, first and length in the pool
    pool: list[int] = []
    pairs: list[tuple[int, int, int]] = []
    classes: list[str] = []
    for code in range(sys.maxunicode + 1):
        char = chr(code)
        if unicodedata.combining(char):
            classes.append(f"{{{code}, {unicodedata.combining(char)}}}")
        fields = unicodedata.decomposition(char).split()
        if not fields or code in HANGUL:
            continue
        compatibility = fields[0].startswith("<")
        parts = [int(f, 16) for f in fields[compatibility:]]
        singles.append(f"{{{code}, {int(compatibility)}, {len(pool)}, {len(parts)}}}")
        pool += parts
        # What NFC puts together again: not the characters that Unicode excludes from composition.
        if not compatibility and len(parts) == 2 and unicodedata.normalize("NFC", char) == char:
            pairs.append((parts[0], parts[1], code))
    pairs.sort()
    text = (
        f"// Written by export/runner/unicode_tables.py: Unicode {unicodedata.unidata_version}.\n"
        f"constexpr Decomposition kDecompositions[] = {{\n{rows(singles)}}};\n"
        f"constexpr char32_t kPool[] = {{\n{rows(map(str, pool))}}};\n"
        f"constexpr Composition kCompositions[] = {{\n{rows(f'{{{a}, {b}, {c}}}' for a, b, c in pairs)}}};\n"
        f"constexpr CombiningClass kClasses[] = {{\n{rows(classes)}}};\n"
    )
    Path(sys.argv[1]).write_text(text)


if __name__ == "__main__":
    main()
