"""The mathematics on arrays: pivoted Cholesky, bases, moments, reductions, solvers, laws."""
