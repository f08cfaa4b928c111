"""Whether a run is the same training in another layout, in the order of reading:

capture         hooks that take the tensors of a step out of a run, or out of the same step by transformers
trace           the tensors of a run on the disk, each as a global one
compare         a run against a trace: how far rounding alone takes two runs apart, and the verdict of what ranks found
report          the table, the operation that made the first difference, and the page
command         the program: the layouts, and the work of each rank of one
"""
