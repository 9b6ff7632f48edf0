// Names of Android's C library that this machine's lacks, for liblapilli.so as it is built for Android (tools/test_android.sh).
extern int *__errno_location(void);
int *__errno(void) { return __errno_location(); }
