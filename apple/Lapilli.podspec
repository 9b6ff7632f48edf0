# The player and its classes for Objective-C and Swift as a pod: in the source archive (make archive), which has what is generated, this
# file lies at the top. Vulkan is found when a program is loaded: add MoltenVK.xcframework to the application (docs/apple.md).
Pod::Spec.new do |s|
  s.name = 'Lapilli'
  s.version = '0.1.0'
  s.summary = 'PyTorch models on any GPU that speaks Vulkan, on Apple devices by MoltenVK.'
  s.homepage = 'https://example.invalid/lapilli'
  s.license = { type: 'Apache-2.0', file: 'LICENSE' }
  s.author = 'The authors of Lapilli'
  s.source = { http: "file:lapilli-#{s.version}.tar.gz" }
  s.osx.deployment_target = '13.3'
  s.ios.deployment_target = '16.3'
  s.source_files = 'src/**/*.{h,cpp}', 'include/*.{h,hpp}', 'generated/**/*.h', 'apple/**/*.{h,mm}'
  s.public_header_files = 'apple/include/LapilliModule.h'
  s.header_mappings_dir = '.'
  s.library = 'c++'
  s.pod_target_xcconfig = {
    'CLANG_CXX_LANGUAGE_STANDARD' => 'c++20',
    'HEADER_SEARCH_PATHS' => %w[include src generated apple/include].map { |folder| "\"$(PODS_TARGET_SRCROOT)/#{folder}\"" }.join(' '),
    'GCC_PREPROCESSOR_DEFINITIONS' =>
      "$(inherited) LAPILLI_VERSION=#{s.version} " +
      %w[PROFILER JSON STREAMS WRITER FIRST_RUN].map { |part| "LAPILLI_HAS_#{part}=1" }.join(' ')
  }
end
