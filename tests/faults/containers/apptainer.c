/* Apptainer for the tests: `apptainer exec [OPTIONS] FOLDER COMMAND...`, as root.
 *
 * It follows Apptainer 1.4 where a job can see a difference: paths that are not bound are missing;
 * variables enter; the first process stays outside, passes signals on to the one inside
 * (monitor_linux.go), which is killed if the first one is (PR_SET_PDEATHSIG in starter.c); without
 * --pid the process ids are the host's.
 */
#include "enter.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

static int fails(const char *what)
{
	fprintf(stderr, "FATAL:   %s %s: %s\n", what, failed_at, strerror(errno));
	return 255;
}

int main(int count, char **arguments)
{
	static char binds[65536];
	const char *workdir = "/";
	int k = 2, number, status;
	sigset_t all, before;
	pid_t child;

	if (count < 4 || strcmp(arguments[1], "exec")) {
		fprintf(stderr, "usage: apptainer exec [options] FOLDER COMMAND...\n");
		return 2;
	}
	for (; k < count && arguments[k][0] == '-'; k++) {
		if (!strcmp(arguments[k], "--bind")) {
			strcat(binds, arguments[++k]);
			strcat(binds, ",");
		} else if (!strcmp(arguments[k], "--pwd")) {
			workdir = arguments[++k];
		}
	}
	sigfillset(&all);
	sigprocmask(SIG_BLOCK, &all, &before);
	child = fork();
	if (child == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		sigprocmask(SIG_SETMASK, &before, NULL);
		if (enter(arguments[k], binds))
			exit(fails("could not open image or bind"));
		failed_at = workdir;
		if (chdir(workdir))
			exit(fails("could not change to"));
		failed_at = arguments[k + 1];
		execvp(failed_at, arguments + k + 1);
		exit(fails("exec"));
	}
	while (sigwait(&all, &number) == 0) {
		if (number != SIGCHLD)
			kill(child, number);
		else if (waitpid(child, &status, WNOHANG) == child)
			return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
	}
	return 255;
}
