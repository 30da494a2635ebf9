-- A page of runs is found by its keys first: so inputs and outcomes are read of no other run. Few runs are
-- open: to find somebody's, all that are open are looked through, instead of all runs of that one.

-- name: list_runs (across tenants: for operators)
SELECT run_key
FROM run
WHERE run_key < :before
ORDER BY run_key DESC
LIMIT :limit;

-- name: list_runs_of_tenant (across users: of one tenant)
SELECT run_key
FROM run
WHERE tenant_id = :tenant_id AND run_key < :before
ORDER BY run_key DESC
LIMIT :limit;

-- name: list_runs_of_user (across sessions: of one user)
SELECT run_key
FROM run
WHERE tenant_id = :tenant_id AND user_id = :user_id AND run_key < :before
ORDER BY run_key DESC
LIMIT :limit;

-- name: list_runs_of_session
SELECT run.run_key
FROM session
JOIN run ON run.session_key = session.session_key
WHERE session.tenant_id = :tenant_id AND session.user_id = :user_id AND session.session_id = :session_id
    AND run.run_key < :before
ORDER BY run.run_key DESC
LIMIT :limit;

-- name: list_open_runs (across tenants: for operators)
SELECT run_key
FROM run INDEXED BY run_open
WHERE outcome IS NULL AND run_key < :before
ORDER BY run_key DESC
LIMIT :limit;

-- name: list_open_runs_of_tenant (across users: of one tenant)
SELECT run_key
FROM run INDEXED BY run_open
WHERE tenant_id = :tenant_id AND outcome IS NULL AND run_key < :before
ORDER BY run_key DESC
LIMIT :limit;

-- name: list_open_runs_of_user (across sessions: of one user)
SELECT run_key
FROM run INDEXED BY run_open
WHERE tenant_id = :tenant_id AND user_id = :user_id AND outcome IS NULL AND run_key < :before
ORDER BY run_key DESC
LIMIT :limit;

-- name: list_open_runs_of_session
SELECT run.run_key
FROM session
JOIN run INDEXED BY run_open ON run.session_key = session.session_key
WHERE session.tenant_id = :tenant_id AND session.user_id = :user_id AND session.session_id = :session_id
    AND run.outcome IS NULL AND run.run_key < :before
ORDER BY run.run_key DESC
LIMIT :limit;

-- name: read_listed_run
SELECT
    run.tenant_id, run.user_id, session.session_id, run.run_id, run.root_run_id, run.parent_run_id, run.app,
    run.input, run.checksum, run.created_at, run.reserved_to, run.final_cursor, run.outcome,
    run.outcome_checksum, run.queued, run.start, run.start_checksum
FROM run
JOIN session ON session.session_key = run.session_key
WHERE run.run_key = :run_key;
