"""Who goes next when requests have to wait; for the live router and for simulations alike."""
