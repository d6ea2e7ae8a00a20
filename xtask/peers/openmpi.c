/* All-reduce of floats over Open MPI: one line of JSON per size. usage: openmpi REPS SIZE... (REPS 0: a quarter second) */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    int fixed = argc > 1 ? atoi(argv[1]) : 0;
    for (int at = 2; at < argc; at++) {
        size_t bytes = strtoull(argv[at], NULL, 10);
        int count = (int)(bytes / sizeof(float));
        float *values = calloc(count > 0 ? count : 1, sizeof(float));
        double start = 0;
        for (int i = 0; i < 4; i++) {
            start = MPI_Wtime();
            MPI_Allreduce(MPI_IN_PLACE, values, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        }
        double once = MPI_Wtime() - start;
        int reps = fixed > 0 ? fixed : (int)(0.25 / (once > 1e-7 ? once : 1e-7));
        reps = reps < 5 ? 5 : reps > 20000 ? 20000 : reps;
        if (fixed > 0) reps = fixed;
        MPI_Bcast(&reps, 1, MPI_INT, 0, MPI_COMM_WORLD);
        double *seconds = malloc(reps * sizeof(double));
        for (int i = 0; i < reps; i++) {
            start = MPI_Wtime();
            MPI_Allreduce(MPI_IN_PLACE, values, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
            seconds[i] = MPI_Wtime() - start;
        }
        qsort(seconds, reps, sizeof(double), ascending);
        if (rank == 0) {
            printf("{\"bytes\": %zu, \"time_us\": %.3f}\n", bytes, seconds[reps / 2] * 1e6);
            fflush(stdout);
        }
        free(seconds);
        free(values);
    }
    MPI_Finalize();
    return 0;
}
