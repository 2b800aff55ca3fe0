# Stop every Ray and Baton process of this host, and verify it. Exit code 3: some are left.
# Arguments: the host's address in the cluster file, seconds of grace before SIGKILL.
#
# Processes of the cluster's `ray start` have RAY_CLOUD_INSTANCE_ID=ADDRESS@LAUNCH in their
# environment, and so do their children, such as Baton's workers. Two kinds of processes are found
# by their command line, as `ray stop` does: those whose title overwrites the environment, and those
# of a manual `ray start`.
address=$1 grace=$2

alive() {
	{
		grep -lazsE "^RAY_CLOUD_INSTANCE_ID=$address@" /proc/[0-9]*/environ
		grep -lazsE '^ray::|^ray-dashboard|/raylet/raylet$|/gcs/gcs_server$|/ray/(_private|dashboard|autoscaler)/.*\.py$' /proc/[0-9]*/cmdline
	} | while IFS=/ read -r _ _ pid _; do
		[ -O "/proc/$pid" ] && echo "$pid"
	done | sort -un
}

gone_within() { # TENTHS of a second
	tenths=$1
	while pids=$(alive) && [ -n "$pids" ]; do
		[ "$tenths" -gt 0 ] || return 1
		tenths=$((tenths - 2))
		sleep 0.2
	done
}

pids=$(alive)
[ -n "$pids" ] || { echo "nothing was running"; exit 0; }
kill -TERM $pids 2>/dev/null
gone_within $((grace * 10)) || {
	kill -KILL $pids 2>/dev/null
	gone_within 30
} || {
	echo "still running:" $pids
	exit 3
}
echo "stopped"
