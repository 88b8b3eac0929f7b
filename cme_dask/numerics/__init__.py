"""Arrays in, arrays out: pivoted Cholesky, bases, moments, the joint law in closed form."""
