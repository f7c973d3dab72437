from tests.support.guard import hangs_fail as hangs_fail
