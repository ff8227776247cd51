"""Facts about the elements 1 to 96, as arrays indexed by atomic number."""

from __future__ import annotations

import numpy as np

__all__ = ["ELECTRONEGATIVITY", "NUMBER", "PROPERTIES", "RADIUS", "SYMBOLS"]

_SYMBOLS = (
    "* H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se "
    "Br Kr Rb Sr Y Zr Nb Mo Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy "
    "Ho Er Tm Yb Lu Hf Ta W Re Os Ir Pt Au Hg Tl Pb Bi Po At Rn Fr Ra Ac Th Pa U Np Pu Am Cm"
)
SYMBOLS = _SYMBOLS.split()
"""Symbols by atomic number; number 0 ("*") is no element: the token of the whole composition."""

NUMBER = {symbol: number for number, symbol in enumerate(SYMBOLS)}
NUMBER |= {"D": 1, "T": 1}  # isotopes of hydrogen

# Pauling's electronegativity; 0 for noble gases without a value.
_ELECTRONEGATIVITY = (
    "0 2.20 0 .98 1.57 2.04 2.55 3.04 3.44 3.98 0 .93 1.31 1.61 1.90 2.19 2.58 3.16 0 .82 1.00 "
    "1.36 1.54 1.63 1.66 1.55 1.83 1.88 1.91 1.90 1.65 1.81 2.01 2.18 2.55 2.96 3.00 .82 .95 1.22 "
    "1.33 1.6 2.16 1.9 2.2 2.28 2.20 1.93 1.69 1.78 1.96 2.05 2.1 2.66 2.6 .79 .89 1.10 1.12 1.13 "
    "1.14 1.13 1.17 1.2 1.20 1.1 1.22 1.23 1.24 1.25 1.1 1.27 1.3 1.5 2.36 1.9 2.2 2.20 2.28 2.54 "
    "2.00 1.62 2.33 2.02 2.0 2.2 0 .7 .9 1.1 1.3 1.5 1.38 1.36 1.28 1.3 1.3"
)
# Covalent radius in pm (Cordero et al., doi:10.1039/b801115j).
_RADIUS = (
    "0 31 28 128 96 84 76 71 66 57 58 166 141 121 111 107 105 102 106 203 176 170 160 153 139 139 "
    "132 126 124 132 122 122 120 119 120 120 116 220 195 190 175 164 154 147 146 142 139 145 144 "
    "142 139 139 138 139 140 244 215 207 204 203 201 199 198 198 196 194 192 192 189 190 187 187 "
    "175 170 162 151 144 141 136 136 132 145 146 148 140 150 150 260 221 215 206 200 196 190 187 "
    "180 169"
)
# Standard atomic weight in u.
_WEIGHT = (
    "0 1.008 4.003 6.94 9.012 10.81 12.011 14.007 15.999 18.998 20.18 22.99 24.305 26.982 28.085 "
    "30.974 32.06 35.45 39.95 39.098 40.078 44.956 47.867 50.942 51.996 54.938 55.845 58.933 "
    "58.693 63.546 65.38 69.723 72.63 74.922 78.971 79.904 83.798 85.468 87.62 88.906 91.224 "
    "92.906 95.95 98 101.07 102.906 106.42 107.868 112.414 114.818 118.71 121.76 127.6 126.904 "
    "131.293 132.905 137.327 138.905 140.116 140.908 144.242 145 150.36 151.964 157.25 158.925 "
    "162.5 164.93 167.259 168.934 173.045 174.967 178.486 180.948 183.84 186.207 190.23 192.217 "
    "195.084 196.967 200.592 204.38 207.2 208.98 209 210 222 223 226 227 232.038 231.036 238.029 "
    "237 244 243 247"
)


def _column(text: str) -> np.ndarray:
    values = np.array(text.split(), float)
    assert len(values) == len(SYMBOLS)
    return values


def _shells() -> np.ndarray:
    """Return period, group and valence electrons (s, p, d, f) of each element, (97, 6).

    Electrons follow the order of filling; the few exceptions (Cu, Cr, ...) are left out.
    """
    rows = [np.zeros(6)]
    for number in range(1, len(SYMBOLS)):
        period, first = 1, 1
        for size in (2, 8, 8, 18, 18, 32, 32):
            if number < first + size:
                break
            period, first = period + 1, first + size
        place = number - first + 1  # 1, 2, ... in the period
        s = min(place, 2)
        p = max(0, place - (size - 6)) if number > 4 and size > 2 else 0
        f = min(max(0, place - 2), 14) if size == 32 else 0
        d = min(max(0, place - 2 - f), 10) if size > 8 else 0
        group = s if p == 0 and d == 0 else (12 + p if p else 2 + d)
        group = 3 if f and not d else (18 if number == 2 else group)
        rows.append(np.array([period, group, s, p, d, f], float))
    return np.stack(rows)


ELECTRONEGATIVITY = _column(_ELECTRONEGATIVITY)
"""Pauling's electronegativities, (97,)."""

RADIUS = _column(_RADIUS)
"""Covalent radii in pm, (97,)."""


def _properties() -> np.ndarray:
    shells = _shells()
    columns = [ELECTRONEGATIVITY, RADIUS, _column(_WEIGHT), *shells.T]
    columns += [shells[:, 2:].sum(1), np.arange(len(SYMBOLS))]
    table = np.stack(columns, axis=1)
    table[1:] = (table[1:] - table[1:].mean(0)) / table[1:].std(0)
    return table


PROPERTIES = _properties()
"""(97, 11): electronegativity, radius, weight, period, group, electrons in s, p, d, f and in all,
atomic number; each with mean 0 and deviation 1 over the elements. Row 0 is zero."""
