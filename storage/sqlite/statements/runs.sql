-- name: find_run
SELECT run_key, session_key
FROM run
WHERE tenant_id = :tenant_id AND user_id = :user_id AND run_id = :run_id;

-- name: read_run
SELECT
    run.tenant_id, run.user_id, session.session_id, run.run_id, run.root_run_id, run.parent_run_id, run.app,
    run.input, run.checksum, run.created_at, run.reserved_to, run.final_cursor, run.outcome,
    run.outcome_checksum, run.queued, run.start, run.start_checksum
FROM run
JOIN session ON session.session_key = run.session_key
WHERE run.tenant_id = :tenant_id AND run.user_id = :user_id AND run.run_id = :run_id;

-- name: read_open_runs
SELECT
    run.tenant_id, run.user_id, session.session_id, run.run_id, run.root_run_id, run.parent_run_id, run.app,
    run.input, run.checksum, run.created_at, run.reserved_to, run.final_cursor, run.outcome,
    run.outcome_checksum, run.queued, run.start, run.start_checksum
FROM session
JOIN run INDEXED BY run_open ON run.session_key = session.session_key
WHERE session.tenant_id = :tenant_id AND session.user_id = :user_id AND session.session_id = :session_id
    AND run.outcome IS NULL
ORDER BY run.run_key;

-- name: add_run
INSERT INTO run (
    session_key, tenant_id, user_id, run_id, root_run_id, parent_run_id, app, input, checksum, created_at,
    reserved_to, final_cursor, outcome, outcome_checksum, queued, start, start_checksum
)
VALUES (
    :session_key, :tenant_id, :user_id, :run_id, :root_run_id, :parent_run_id, :app, :input, :checksum,
    :created_at, :reserved_to, :final_cursor, :outcome, :outcome_checksum, :queued, :start, :start_checksum
);

-- name: begin_run
UPDATE run
SET queued = 0
WHERE run_key = :run_key;

-- name: finish_run
UPDATE run
SET outcome = :outcome, outcome_checksum = :outcome_checksum, final_cursor = :final_cursor
WHERE run_key = :run_key;

-- name: reserve_events
UPDATE run
SET reserved_to = max(reserved_to, :reserve_to)
WHERE run_key = :run_key;

-- name: add_event
INSERT INTO event (run_key, sequence, body, checksum)
VALUES (:run_key, :sequence, :body, :checksum)
ON CONFLICT (run_key, sequence) DO NOTHING;

-- name: read_events
SELECT event.sequence, event.body, event.checksum
FROM run
JOIN event ON event.run_key = run.run_key
WHERE run.tenant_id = :tenant_id AND run.user_id = :user_id AND run.run_id = :run_id
    AND event.sequence > :after
ORDER BY event.sequence
LIMIT :limit;

-- name: delete_events_of
DELETE FROM event
WHERE run_key IN (SELECT run_key FROM run WHERE session_key = :session_key);

-- name: delete_runs_of
DELETE FROM run
WHERE session_key = :session_key;
