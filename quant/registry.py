from quant.errors import QuantError
from quant.wide import Wide
def scheme_by_name(name):
    if name=="none": return Wide()
    raise QuantError(name)
def scheme_names(): return ("none",)
