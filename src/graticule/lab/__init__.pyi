from .testing import check_task as check_task
