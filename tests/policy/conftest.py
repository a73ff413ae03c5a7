import numba
import numpy as np

if numba.config.DISABLE_JIT:
    # Hashes wrap around on purpose; interpreted, NumPy would warn of it.
    np.seterr(over="ignore")
