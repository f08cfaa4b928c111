"""Whether a run is the same training in another layout, in the order of reading:

parts           a part of a global tensor, as one rank holds it
capture         hooks that take such parts out of a step
trace           the tensors of a run on the disk, each as a global one
differences     two tensors, in units of roundoff
compare         a run against a trace, while it runs
rounding        how far rounding alone takes two runs apart
verdict         what the ranks found, put together
operations      which operation made a tensor

layouts         command lines of the layouts
runs            a run that is recorded or compared
huggingface     the same step by transformers
table, page     what a person sees
"""
