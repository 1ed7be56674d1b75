"""Compiled programs: what is compiled, once for what it does, and checks of values that are not there yet."""

from npgp.programs.compiled import QUICK, STEPS, Program, on_grid, one_model_at_a_time, one_program
from npgp.programs.later import SeesLater, see_later
from npgp.programs.operations import Operations

__all__ = [
    "QUICK",
    "STEPS",
    "Operations",
    "Program",
    "SeesLater",
    "on_grid",
    "one_model_at_a_time",
    "one_program",
    "see_later",
]
