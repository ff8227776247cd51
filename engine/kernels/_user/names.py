"""Names that a kernel's source cannot declare, since C++ or CUDA reserves them."""

from __future__ import annotations

__all__ = ["is_reserved", "is_reserved_kernel"]

# The keywords are those of C++17.
_KEYWORDS = (
    "alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t "
    "char32_t class compl const const_cast constexpr continue decltype default delete do double "
    "dynamic_cast else enum explicit export extern false float for friend goto if inline int long "
    "mutable namespace new noexcept not not_eq nullptr operator or or_eq private protected public "
    "register reinterpret_cast return short signed sizeof static static_assert static_cast struct "
    "switch template this thread_local throw true try typedef typeid typename union unsigned "
    "using virtual void volatile wchar_t while xor xor_eq"
)
_VARIABLES = "threadIdx blockIdx blockDim gridDim warpSize"
# Functions of CUDA's headers: a kernel is declared extern "C" and cannot overload them.
_FUNCTIONS = (
    "abs acos acosh asin asinh assert atan atan2 atanh cbrt ceil clock64 copysign cos cosh cospi "
    "cyl_bessel_i0 erf erfc erfcinv erfcx erfinv exp exp10 exp2 expm1 fabs fdim fdivide floor fma "
    "fmax fmin fmod free frexp hypot ilogb j0 j1 jn labs ldexp lgamma llabs llmin llrint llround "
    "log log10 log1p log2 logb lrint lround malloc max min modf nan nearbyint nextafter norm "
    "norm3d norm4d normcdf normcdfinv pow printf rcbrt remainder remquo rhypot rint rnorm round "
    "rsqrt scalbln scalbn sin sincos sincospi sinh sinpi sqrt tan tanh tgamma trunc ullmin umax "
    "umin y0 y1 yn"
)
_NOT_A_PARAMETER = frozenset(f"{_KEYWORDS} {_VARIABLES}".split())
_NOT_A_KERNEL = _NOT_A_PARAMETER | {"main", *_FUNCTIONS.split()}
_OF_FLOATS = frozenset(f"{name}f" for name in _FUNCTIONS.split())


def is_reserved(name: str) -> bool:
    """Tell whether a parameter cannot have this name.

    >>> is_reserved("rows"), is_reserved("class"), is_reserved("blockIdx")
    (False, True, True)
    """
    return name in _NOT_A_PARAMETER


def is_reserved_kernel(name: str) -> bool:
    """Tell whether a kernel cannot have this name.

    >>> is_reserved_kernel("class"), is_reserved_kernel("tanhf"), is_reserved_kernel("dof")
    (True, True, False)
    """
    return name in _NOT_A_KERNEL or name in _OF_FLOATS
