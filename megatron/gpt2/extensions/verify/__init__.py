"""Whether a run is the same training in another layout, in the order of reading:

capture         hooks that take the tensors of a step out of a run
trace           the tensors of a run on the disk, each as a global one
rounding        how far two tensors are from each other, and how far rounding alone takes two runs apart
compare         a run against a trace, and the verdict of what its ranks found
huggingface     the same step by transformers
runs            the layouts, and what each rank of one does
report          the table, the operation that made the first difference, and the page
command         the program
"""
