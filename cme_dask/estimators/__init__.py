"""scikit-learn style estimators, each a short recipe that ends in a frozen model."""
