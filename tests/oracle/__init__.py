"""A second implementation of everything the library decodes with, in plain NumPy.

One sequence, no padding, no compiled loops, nothing imported from the library: every rule is
written out as a loop over positions or clusters, in the precision of the weights it is given
(float64 by default). Tests first check it against the recorded trajectories, then compare the
library with it where no recording exists.
"""
