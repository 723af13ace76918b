from .methods import check_backbone as check_backbone
from .methods import check_encoding as check_encoding
from .methods import check_joining as check_joining
from .methods import check_model as check_model
from .methods import check_resampler as check_resampler
from .places import check_places as check_places
from .tables import TableCode as TableCode
from .tables import inspect_table as inspect_table
