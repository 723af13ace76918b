from .files import Card as Card
from .kinds import HubModel as HubModel
from .kinds import register_kind as register_kind
