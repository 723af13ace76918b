from .comparison import compare as compare
from .execution import executor_of as executor_of
from .execution import train_runs as train_runs
from .plan import plan as plan
from .plan import planned_rows as planned_rows
from .results import Results as Results
