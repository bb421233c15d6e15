"""Methods that hold outputs instead of weights: on the new task's inputs (LwF), or on replayed samples (DER++)."""

from mooring_lab.methods.baselines import SAMPLES
from mooring_lab.methods.method import Method
from mooring_lab.methods.strengths import DIGITS_STRENGTHS

WEIGHTS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)

METHODS = [
    Method(
        "lwf",
        "distil the old heads' outputs on the new task's inputs, times a weight (its strength; LwF)",
        strength=DIGITS_STRENGTHS["lwf"],
        dial=WEIGHTS,
        temperature=2.0,
    ),
    Method(
        "der++",
        "replay old samples with stored outputs, times a weight (its strength), and with labels (DER++)",
        strength=DIGITS_STRENGTHS["der++"],
        dial=WEIGHTS,
        data="der++",
        memory=SAMPLES,
    ),
]
