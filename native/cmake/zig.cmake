# The player for another system, by zig (pip install ziglang), which brings a clang, a libc++ and the C library of each system.
# LAPILLI_ZIG: the program; LAPILLI_ZIG_TARGET: as zig names it, such as x86_64-linux-gnu.2.28, aarch64-linux-musl,
# x86_64-windows-gnu or aarch64-macos.11.0. tools/wheels.sh makes wheels by it.
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES LAPILLI_ZIG LAPILLI_ZIG_TARGET)
string(REGEX MATCH "^([a-z0-9_]+)-([a-z]+)" CMAKE_MATCH "${LAPILLI_ZIG_TARGET}")
set(CMAKE_SYSTEM_PROCESSOR ${CMAKE_MATCH_1})
if(CMAKE_MATCH_2 STREQUAL "linux")
  set(CMAKE_SYSTEM_NAME Linux)
  set(CMAKE_EXECUTABLE_FORMAT ELF)
elseif(CMAKE_MATCH_2 STREQUAL "windows")
  set(CMAKE_SYSTEM_NAME Windows)
  set(CMAKE_RC_COMPILER ${LAPILLI_ZIG}) # CMake asks for one, and there are no resources
elseif(CMAKE_MATCH_2 STREQUAL "macos")
  set(CMAKE_SYSTEM_NAME Darwin)
  set(CMAKE_OSX_SYSROOT "")
  set(CMAKE_OSX_DEPLOYMENT_TARGET "")
else()
  message(FATAL_ERROR "LAPILLI_ZIG_TARGET is '${LAPILLI_ZIG_TARGET}'; a processor, then linux, windows or macos are accepted")
endif()
set(CMAKE_C_COMPILER ${LAPILLI_ZIG} cc -target ${LAPILLI_ZIG_TARGET})
set(CMAKE_CXX_COMPILER ${LAPILLI_ZIG} c++ -target ${LAPILLI_ZIG_TARGET})
set(CMAKE_C_FLAGS_INIT -g0) # zig's default is -g
set(CMAKE_CXX_FLAGS_INIT -g0)
if(NOT CMAKE_SYSTEM_NAME STREQUAL "Darwin") # zig's own libc++ is built with three times as many bytes for debuggers
  set(CMAKE_SHARED_LINKER_FLAGS_INIT -s)
endif()
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)

# CMake links programs to get to know a compiler, for each of which zig would compile its libc++ anew: minutes. This one is known.
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
foreach(language C CXX)
  set(CMAKE_${language}_COMPILER_ID_RUN ON)
  set(CMAKE_${language}_COMPILER_ID Clang)
  set(CMAKE_${language}_COMPILER_VERSION 21.1)
  set(CMAKE_${language}_COMPILER_FRONTEND_VARIANT GNU)
  set(CMAKE_${language}_EXTENSIONS_COMPUTED_DEFAULT ON)
endforeach()
set(CMAKE_C_STANDARD_COMPUTED_DEFAULT 17)
set(CMAKE_CXX_STANDARD_COMPUTED_DEFAULT 17)
