# Check whether this host can be a node. Prints one sentence per problem; then exit code 3.
# Arguments: PYTHON (command), its version ("3.11"), Ray's version, the node's virtual environment.
python=$1 wanted=$2 ray=$3 venv=$4
case $venv in "~/"*) venv=$HOME/${venv#??} ;; esac

problem() {
	echo "$1"
	exit 3
}

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

for tool in bash rsync; do
	command -v "$tool" >/dev/null || problem "has no $tool; install it there"
done
found=$(version_of "$python") || problem "has no $python; install Python $wanted there, or set provider.python"
[ "$found" = "$wanted" ] || problem "$python is Python $found, but this cluster runs Python $wanted; install it there, or set provider.python"
[ -e "$venv/bin/python" ] || exit 0 # the setup commands make it
found=$(version_of "$venv/bin/python") || problem "$venv has a Python that does not start; remove $venv there"
[ "$found" = "$wanted" ] || problem "$venv has Python $found, but this cluster runs Python $wanted; remove $venv there"
found=$("$venv/bin/python" -P -c 'import importlib.metadata as m; print(m.version("ray"))' 2>/dev/null) || exit 0
[ "$found" = "$ray" ] || problem "$venv has Ray $found, but this cluster runs Ray $ray; remove $venv there"
