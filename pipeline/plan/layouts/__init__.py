"""How a tensor lies on devices, and the cheapest way from one layout to another.

A layout is a vector <R, V, D1, ..., Dk>: ``R`` copies of ``V`` partial sums of a tensor cut into ``D`` parts along each
of its axes, R * V * D1 * ... * Dk devices in all (RVD, of SuperScaler, arXiv 2301.08984, and nnScaler, OSDI '24).
``vectors`` finds the shortest path between two vectors, ``placed`` puts it on devices, ``boxes`` cuts tensors where
layouts are not even."""
