"""Default methods, learning rates and limits of studies, which the command line shows without importing torch."""

COMPARED_METHODS = "plain,ewc,explicit-ewc,proximal-ewc,budget-kronecker,joint"
"""The methods of a comparison that names none."""

SWEPT_METHODS = (
    "plain,frozen-after-first,joint,ewc,mas,si,rwalk,uniform,l2-sp,explicit-ewc,soft-ewc,soft-mas,soft-si,soft-rwalk,"
    "sfa,wise-ft,imm-mean,imm-mode,cofima,summed-ewc,clamped-summed-ewc,laplace-kronecker,clamped-laplace-kronecker,"
    "proximal-ewc,budget-ewc,budget-kronecker,gpm,nscl,owm,ftp,tpgm,lwf,er,der++,distil,budget-measured,budget-distil"
)
"""The methods of a frontier that names none."""

LRS = (0.1, 0.03, 0.01, 0.003, 0.001)
STRENGTHS = (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0, 1e3, 1e4)
"""The paper's grids."""

MAX_SEEDS = 100_000
"""A larger number of seeds is taken for a typing error."""
