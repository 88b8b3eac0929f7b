"""The joint distribution written down a second time, densely, without importing cme_dask.

Everything is a plain mean over the n rows; matrices n x m are formed; systems go to
``numpy.linalg.solve``. Nothing here is shared with the package.
"""

import numpy as np


def newton(kernel, X, pivots):
    """N(x) = k(x, p) R^-T with K(p, p) = R R^T."""
    factor = np.linalg.cholesky(np.asarray(kernel(pivots, pivots), np.float64))
    return np.linalg.solve(factor, np.asarray(kernel(X, pivots), np.float64).T).T


def means(kernel_x, kernel_y, X, Y, pivots_x, pivots_y, weights=None, functions=None):
    w = np.full(len(X), 1 / len(X)) if weights is None else weights / weights.sum()
    Nx, Ny = newton(kernel_x, X, pivots_x), newton(kernel_y, Y, pivots_y)
    wx, wy = w[:, None] * Nx, w[:, None] * Ny
    diagonals = [
        np.array([float(k(z[None], z[None])[0, 0]) for z in Z])
        for k, Z in ((kernel_x, X), (kernel_y, Y))
    ]
    result = {
        "xx": Nx.T @ wx,
        "yy": Ny.T @ wy,
        "yx": Ny.T @ wx,
        "cx": wx.sum(axis=0),
        "cy": wy.sum(axis=0),
        "tau_x": 1 - (w * (Nx**2).sum(axis=1)).sum() / (w * diagonals[0]).sum(),
        "tau_y": 1 - (w * (Ny**2).sum(axis=1)).sum() / (w * diagonals[1]).sum(),
    }
    if functions is not None:
        result["f"] = w @ functions
        result["xf"] = wx.T @ functions
        result["yf"] = wy.T @ functions
    return result


def _frame(c):
    """Orthonormal complement of c as columns, by a complete QR factorisation."""
    return np.linalg.qr(c[:, None], mode="complete")[0][:, 1:]


def coefficients(m, constraint, reg, form):
    """H on the Newton bases, shape (m_Y, m_X), from the optimality system of the problem.

    ``reg`` is (r_Y, r_X), or one number for the single form. With reg = 0 the system is solved in
    eigenbases without the directions that are rounding (lam <= eps m lam_max).
    """
    if constraint == "normalized":
        Qx, Qy = _frame(m["cx"]), _frame(m["cy"])
        target = Qy.T @ m["yx"] @ Qx
    else:
        Qx, Qy = np.eye(len(m["cx"])), np.eye(len(m["cy"]))
        target = m["yx"] - np.outer(m["cy"], m["cx"])
    Sx, Sy = Qx.T @ m["xx"] @ Qx, Qy.T @ m["yy"] @ Qy
    if form == "two-sided" and min(reg) > 0:
        inner = np.linalg.solve(Sy + reg[0] * np.eye(len(Sy)), target)
        G = np.linalg.solve(Sx + reg[1] * np.eye(len(Sx)), inner.T).T
    else:
        lx, Vx = np.linalg.eigh(Sx)
        ly, Vy = np.linalg.eigh(Sy)
        if np.max(reg) == 0:
            keep_x = lx > np.finfo(float).eps * len(lx) * lx.max()
            keep_y = ly > np.finfo(float).eps * len(ly) * ly.max()
            lx, Vx, ly, Vy = lx[keep_x], Vx[:, keep_x], ly[keep_y], Vy[:, keep_y]
        single = float(np.max(reg))
        G = Vy @ ((Vy.T @ target @ Vx) / (np.outer(ly, lx) + single)) @ Vx.T
    return Qy @ G @ Qx.T


def density_ratio(Nx, Ny, H):
    """G = 1 + N_Y(y)^T H N_X(x) of all pairs, shape (n_X, n_Y)."""
    return 1 + Nx @ H.T @ Ny.T


def expect(Nx, H, m):
    """E[f(Y) | x] = E f + N_X(x)^T H^T E[N_Y f^T], shape (n, q)."""
    return m["f"] + Nx @ H.T @ m["yf"]


def pivoted_cholesky(K, tol, max_rank=None):
    """Algorithm 1 of the joint paper on a full matrix; ties within 1e-10 to the lowest index."""
    d, L, pivots = np.diag(K).astype(float).copy(), np.zeros((len(K), 0)), []
    trace = d.sum()
    while d.sum() > tol * trace and len(pivots) < (max_rank or len(K)):
        if d.max() <= 1e-13 * np.diag(K).max():
            break
        j = int(np.flatnonzero(d >= d.max() * (1 - 1e-10))[0])
        column = (K[:, j] - L @ L[j]) / np.sqrt(d[j])
        L, d = np.column_stack([L, column]), np.maximum(d - column**2, 0)
        pivots.append(j)
    return pivots, L
