"""Time and memory of a tape: clocks and memory (`timeline`), rewrites (`passes`), devices and links (`hardware`), and
forecasts for a cluster (`predict`). Read them in this order."""
