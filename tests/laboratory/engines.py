"""The study that engines are compared by."""

from laboratory.test_kill import DIGITS

ASKED = ["compare", "--methods", "plain,ewc,si,er,explicit-mas", *DIGITS, "--study", "study.sqlite"]
