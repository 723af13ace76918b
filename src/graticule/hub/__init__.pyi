from .files import Card as Card
from .files import check_repo_id as check_repo_id
from .files import push_folder as push_folder
from .kinds import HubModel as HubModel
from .kinds import register_kind as register_kind
